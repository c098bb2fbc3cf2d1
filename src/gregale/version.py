"""The version of Gregale, which any module may import: the package itself imports others for types."""

__version__ = "0.2.0"
