"""Tests of the compiled sources without Python."""
