"""`pykernels bench drafts`: steps that check drafts, measured and predicted."""
