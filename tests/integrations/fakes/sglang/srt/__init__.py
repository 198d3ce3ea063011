"""Of the stand-in for SGLang."""
