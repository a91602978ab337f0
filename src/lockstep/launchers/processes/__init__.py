"""torch elastic and srun: forming a job, and forming it again; who owns OUTPUT."""
