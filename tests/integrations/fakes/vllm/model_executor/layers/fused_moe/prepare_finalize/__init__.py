"""Of the stand-in for vLLM: stages around a modular kernel."""
