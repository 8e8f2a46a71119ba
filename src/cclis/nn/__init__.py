"""Networks: encoders, projection, prototypes, classifiers."""
