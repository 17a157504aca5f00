"""Whole engines, octavo's attention in them beside their own: text, perplexity, and time of engine steps."""
