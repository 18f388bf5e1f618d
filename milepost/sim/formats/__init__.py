"""Trace formats: one module each, with a reader and where it makes sense a writer."""
