"""TaskHarbor: a leased job queue with one contract and interchangeable backends."""
