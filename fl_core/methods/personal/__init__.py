"""Methods with private parts or personal models."""
