"""What ranks measure of themselves: phases, memory, profiles, the journal of events."""
