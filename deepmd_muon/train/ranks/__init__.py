"""The processes of one run: how they start, meet, agree, and notice that one is gone."""
