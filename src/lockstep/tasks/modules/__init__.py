"""What the task `module` is made of: the user's functions, their data sets, how a batch is run, and what was found."""
