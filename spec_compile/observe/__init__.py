"""Graphs and reports for people: stable text, trace artifacts, HTML."""
