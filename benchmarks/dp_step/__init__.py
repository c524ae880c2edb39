"""What a private step costs beside a plain one, and beside bare Opacus."""
