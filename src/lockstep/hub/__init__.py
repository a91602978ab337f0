"""The export's model card, and pushing it to the Hub."""
