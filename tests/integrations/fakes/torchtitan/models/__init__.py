"""Of the stand-in for torchtitan."""
