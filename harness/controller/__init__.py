"""The controller: the recovery loop, and the policies and knowledge that it decides by."""
