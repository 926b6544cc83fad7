"""The version of the package: that of the library it was built with."""

__version__ = "0.1.0"
