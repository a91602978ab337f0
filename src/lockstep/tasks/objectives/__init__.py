"""Objectives of `classification`: one label, several labels, or numbers; with loss, scores and answers."""
