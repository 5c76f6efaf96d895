"""The agreement on who trains together: rendezvous in the bucket, peer connections, gossip."""
