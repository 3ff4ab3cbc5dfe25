from torchvision.transforms import InterpolationMode, functional

__all__ = ["InterpolationMode", "functional"]
