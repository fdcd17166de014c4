"""The journey of a save, one file per stage: arena (snapshot memory), plan, encode, upload, commit. No torch."""
