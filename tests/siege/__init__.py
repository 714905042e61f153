"""Strangers at the door, all at once, beside an honest client."""
