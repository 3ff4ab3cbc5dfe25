from enum import Enum

from torchvision.transforms import functional

__all__ = ["InterpolationMode", "functional"]

NAMES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
InterpolationMode = Enum("InterpolationMode", {name.upper().replace("-", "_"): name for name in NAMES})
