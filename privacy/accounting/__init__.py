"""Configuration -> planned releases -> epsilon."""
