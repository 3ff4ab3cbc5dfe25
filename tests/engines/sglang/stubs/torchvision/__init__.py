"""Import-only stand-in: the published wheels need a GPU build of torch, and no test decodes an image."""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0.0"
