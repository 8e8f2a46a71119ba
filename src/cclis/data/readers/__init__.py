"""Readers of image datasets: CIFAR, Tiny-ImageNet, digits, image folders, npz files."""

from cclis.data.readers.cifar import CIFAR10, CIFAR100, CifarLayout, read_cifar10, read_cifar100
from cclis.data.readers.dataset import Dataset, Split
from cclis.data.readers.digits import read_digits
from cclis.data.readers.image_folder import read_image_folder
from cclis.data.readers.npz import read_npz
from cclis.data.readers.tiny_imagenet import (
    TINY_CACHE,
    TINY_IMAGENET,
    find_tiny_imagenet,
    read_tiny_imagenet,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "TINY_CACHE",
    "TINY_IMAGENET",
    "CifarLayout",
    "Dataset",
    "Split",
    "find_tiny_imagenet",
    "read_cifar10",
    "read_cifar100",
    "read_digits",
    "read_image_folder",
    "read_npz",
    "read_tiny_imagenet",
]
