"""What clients upload: as bytes, and folded into a mean."""
