"""Everything that checks moeos."""
