"""Generated messages; `make protos` writes them."""
