"""The version, which a record beside every export names."""

__version__ = "0.1.0"
