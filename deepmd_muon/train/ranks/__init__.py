"""The processes of one run: how they are started, find each other, agree, and notice that one is gone."""
