"""The issuer: signs the certificates of pods in clusters without cert-manager."""
