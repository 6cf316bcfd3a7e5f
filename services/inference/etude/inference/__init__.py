"""The inference role: samples from the policy and follows its versions."""
