"""`launch/evaluate`: the thesis' evaluation, with moeos and with an all-to-all."""
