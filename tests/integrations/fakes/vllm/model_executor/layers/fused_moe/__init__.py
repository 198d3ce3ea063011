"""Of the stand-in for vLLM: the routed experts of a layer."""
