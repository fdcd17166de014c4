"""Bytes and records of format version 1 (see SPEC.md). Pure: no I/O, no torch."""
