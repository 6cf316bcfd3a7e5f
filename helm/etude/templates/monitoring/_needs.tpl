{{- /* Refuse a value whose kind the cluster does not serve: dict root, value, kind. */ -}}
{{- define "etude.needsMonitoring" -}}
{{- if not (.root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind)) -}}
{{- fail (printf "%s: this cluster serves no %s of monitoring.coreos.com/v1: install the Prometheus Operator's CRDs first, or set it to false (with `helm template`, add --api-versions monitoring.coreos.com/v1/%s)" .value .kind .kind) -}}
{{- end -}}
{{- end -}}
