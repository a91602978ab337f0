"""torch elastic and srun: start the ranks of a machine, detect that one died, form the process group again."""
