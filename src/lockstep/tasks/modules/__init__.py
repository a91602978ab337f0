"""Parts of the task `module`: the user's functions, their data sets, running a batch, inferring the kind of the
loss."""
