"""Ahead-of-time packages (`kind="aoti"`): exported, compiled, and called under guards that are data."""
