{{- /* What a platform adds to pods of the chart: `at` names the values, `own` are they. */ -}}

{{- /* Further variables; `taken` is a pattern of the names that the chart sets. */ -}}
{{- define "etude.extraEnv" -}}
{{- range .own.extraEnv }}
{{- if regexMatch $.taken .name }}
{{- fail (printf "%s.extraEnv: %s is set by the chart: use the value that it stands for" $.at .name) }}
{{- end }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Further volumes; `taken` are the names of the chart's. */ -}}
{{- define "etude.extraVolumes" -}}
{{- range .own.extraVolumes }}
{{- if has .name $.taken }}
{{- fail (printf "%s.extraVolumes: the chart has a volume %s: take another name" $.at .name) }}
{{- end }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Where pods may run: `own` says it, or what holds for all pods of the chart. */ -}}
{{- define "etude.placement" -}}
{{- $all := .root.Values.operator -}}
{{- with .own.priorityClassName | default $all.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- range $part := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.own $part | default (index $all $part) }}
{{ $part }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}
