"""What `classification` learns of a text: one label, several, or numbers; with loss, scores and answers."""
