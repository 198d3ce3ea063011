"""`launch/straggler`: what a late or slow rank costs a layer, with moeos and with an all-to-all."""
