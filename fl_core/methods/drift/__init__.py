"""Methods against client drift: local training that is corrected, or steps that are normalised."""
