"""How ranks find each other, agree, are watched, and how a job is looked after from outside."""
