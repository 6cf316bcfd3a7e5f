{{- /* Policies belong to the cluster, so their names tell releases of two namespaces apart. */ -}}
{{- define "etude.policyName" -}}
{{ include "etude.name" .root }}-{{ .name }}.{{ .root.Release.Namespace }}
{{- end -}}

{{- /* The beginning of a policy on one of our kinds: dict root, name, resource, operations. */ -}}
{{- define "etude.policy" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ include "etude.policyName" . }}
  labels: {{- include "etude.labels" .root | nindent 4 }}
spec:
  # There is no webhook that could be away: the API server itself evaluates this.
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [etude.dev]
        apiVersions: ["*"]
        resources: [{{ .resource }}]
        operations: {{ toJson .operations }}
{{- end -}}

{{- /* Where a policy holds: in the namespaces that this release serves. */ -}}
{{- define "etude.binding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ include "etude.policyName" . }}
  labels: {{- include "etude.labels" .root | nindent 4 }}
spec:
  policyName: {{ include "etude.policyName" . }}
  validationActions: [{{ .root.Values.admission.action }}]
  matchResources:
    namespaceSelector: {{- include "etude.servedNamespaces" .root | nindent 6 }}
{{- end -}}
