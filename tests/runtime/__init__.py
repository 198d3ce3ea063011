"""Tests of runtime/: one file for each property of the device OS."""
