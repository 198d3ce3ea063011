"""Tests of what a person starts."""
