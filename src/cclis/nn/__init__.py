"""Networks: encoders, projection, prototypes."""
