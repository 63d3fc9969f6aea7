"""Pure functions from a graph to facts about it; nothing here edits a graph."""
