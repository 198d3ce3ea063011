"""Tests of the pages for users: what they show is what the package does."""
