"""Methods against client drift."""
