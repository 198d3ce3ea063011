"""Of the stand-in for vLLM."""
