from enum import Enum

from torchvision.transforms import functional

__all__ = ["InterpolationMode", "functional"]

InterpolationMode = Enum(
    "InterpolationMode",
    {
        name.upper().replace("-", "_"): name
        for name in "nearest nearest-exact bilinear bicubic box hamming lanczos".split()
    },
)
